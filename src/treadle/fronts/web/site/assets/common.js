(() => {
  "use strict";
  const NAME = "treadle.key";
  const { origin, pathname } = location;
  document.documentElement.classList.add("js");
  const asBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

  // The key lives in this tab only. Where the browser forbids storage it lives until the next page.
  const stored = (act) => {
    try {
      return act(sessionStorage);
    } catch {
      return null;
    }
  };
  const treadle = (window.treadle = {
    root: origin + pathname.slice(0, pathname.lastIndexOf("/")),
    key: () => stored((tab) => tab.getItem(NAME)),
    keep: (key) => stored((tab) => tab.setItem(NAME, key)),
    forget: () => stored((tab) => tab.removeItem(NAME)),
    get(url, accept, key = treadle.key()) {
      const headers = { Accept: accept };
      if (key) headers.Authorization = `Bearer ${asBytes(key)}`;
      return fetch(url, { headers, cache: "no-store", signal: AbortSignal.timeout(5000) });
    },
  });

  async function copy(button) {
    const code = button.parentElement.querySelector("code");
    let done = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code); // no clipboard without https: the old way
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 1600);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.matches(".copy")) copy(button);
    if (button?.matches("#forget")) {
      treadle.forget();
      location.reload();
    }
  });
  treadle.address = (within) => {
    for (const place of within.querySelectorAll("[data-root]")) place.textContent = treadle.root;
  };
  treadle.address(document);
  const forget = document.getElementById("forget");
  if (forget) forget.hidden = !treadle.key();
})();
