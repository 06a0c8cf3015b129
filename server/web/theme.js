// Light or dark theme: the system's, unless the user chooses.

const KEPT = "tidewheel.theme";

/** Lets the user choose with `select`, which has the values "light", "dark" and "". */
export function chooseTheme(select, storage) {
  select.value = document.documentElement.dataset.theme ?? "";
  select.addEventListener("change", () => {
    if (select.value) document.documentElement.dataset.theme = select.value;
    else delete document.documentElement.dataset.theme;
    try {
      if (select.value) storage.setItem(KEPT, select.value);
      else storage.removeItem(KEPT);
    } catch {
      // The browser has no storage left: the choice lasts while the page is open.
    }
  });
}
