// Runs before the first paint: the chosen theme, or the system's.
(() => {
  const names = ["system", "light", "dark"];
  const kept = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // storage is blocked: the choice lasts as long as the page
    }
  };
  let theme = names.includes(kept()) ? kept() : "system";
  const apply = () => {
    document.documentElement.dataset.theme = theme;
  };
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    const label = document.getElementById("theme-name");
    const tell = () => (label.textContent = theme);
    tell();
    document.getElementById("theme").addEventListener("click", () => {
      theme = names[(names.indexOf(theme) + 1) % names.length];
      apply();
      tell();
      try {
        localStorage.setItem("theme", theme);
      } catch {
        // as above
      }
    });
  });
})();
