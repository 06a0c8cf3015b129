// Runs before the page is drawn, so that it never flashes in the other theme. theme.js does the rest.

try {
  const theme = localStorage.getItem("tidewheel.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // The browser stores nothing: use the system's theme.
}
