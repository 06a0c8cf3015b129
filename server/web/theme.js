// Light or dark: as the system has it, unless the person chooses.

const KEPT = "tidewheel.theme";

/** Lets `select`, with the values "light", "dark" and "", choose. */
export function chooseTheme(select, storage) {
  select.value = document.documentElement.dataset.theme ?? "";
  select.addEventListener("change", () => {
    if (select.value) document.documentElement.dataset.theme = select.value;
    else delete document.documentElement.dataset.theme;
    try {
      if (select.value) storage.setItem(KEPT, select.value);
      else storage.removeItem(KEPT);
    } catch {
      // No room in the browser: it holds for as long as the page is open.
    }
  });
}
