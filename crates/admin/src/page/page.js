// Requests the page again every three seconds while it is visible, and updates only what has changed, so that focus,
// scroll position and open details are kept.
"use strict";

(() => {
  const INTERVAL_MS = 3000;
  const TIMEOUT_MS = 10000;
  const main = document.querySelector("main");
  const stale = document.getElementById("stale");
  const pause = document.getElementById("pause");
  let paused = false;
  let timer = 0;
  let requesting = false;

  const copy = (node) => document.importNode(node, true);

  function attributes(from, to) {
    for (const { name, value } of to.attributes) {
      if (from.getAttribute(name) !== value) from.setAttribute(name, value);
    }
    for (const { name } of [...from.attributes]) {
      // Details that the reader has opened stay open.
      if (!to.hasAttribute(name) && !(name === "open" && from.nodeName === "DETAILS")) from.removeAttribute(name);
    }
  }

  // Makes the children of `from` equal to those of `to`. A child with an id is found at any position.
  function children(from, to) {
    let at = from.firstChild;
    for (const wanted of to.childNodes) {
      const named = wanted.id && document.getElementById(wanted.id);
      if (named && named.parentNode === from && named !== at) from.insertBefore(named, at);
      const here = named && named.parentNode === from ? named : at;
      const same = here && here.nodeType === wanted.nodeType && here.nodeName === wanted.nodeName
        && (here.id || "") === (wanted.id || "");
      if (!same) {
        from.insertBefore(copy(wanted), at);
        continue;
      }
      at = here.nextSibling;
      if (here.nodeType === Node.ELEMENT_NODE) {
        attributes(here, wanted);
        children(here, wanted);
      } else if (here.data !== wanted.data) {
        here.data = wanted.data;
      }
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  async function refresh() {
    if (requesting) return;
    requesting = true;
    try {
      const response = await fetch("./", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
      if (!response.ok) throw new Error(`HTTP ${response.status}`);
      const text = await response.text();
      const page = new DOMParser().parseFromString(text, "text/html");
      const fresh = page.querySelector("main");
      if (!fresh) throw new Error("no page");
      document.title = page.title;
      children(main, fresh);
      stale.hidden = true;
      document.body.classList.remove("stale");
    } catch {
      const at = document.querySelector("time.at");
      // Written once, so that a screen reader announces it once.
      if (stale.hidden) {
        stale.textContent = `rangecache does not respond. The figures below are from ${at ? at.textContent : "before"}.`;
        stale.hidden = false;
        document.body.classList.add("stale");
      }
    }
    requesting = false;
    schedule();
  }

  function schedule() {
    clearTimeout(timer);
    if (!paused && document.visibilityState === "visible") timer = setTimeout(refresh, INTERVAL_MS);
  }

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Continue" : "Pause";
    if (paused) clearTimeout(timer);
    else refresh();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible" && !paused) refresh();
    else clearTimeout(timer);
  });
  schedule();
})();
