(() => {
  "use strict";
  const { root, key, keep, forget, get } = window.treadle;
  const form = document.querySelector("form");
  const input = form.querySelector("input");
  const said = document.getElementById("said");
  const address = location.origin + location.pathname + location.search;

  function tell(text, wrong) {
    said.textContent = text;
    said.className = wrong ? "wrong" : "soft";
  }

  function ask(why) {
    tell(why, true);
    form.hidden = false;
    input.select();
    input.focus();
  }

  function show(type, text) {
    if (type.startsWith("text/html")) {
      document.open();
      document.write(text);
      document.close();
      return;
    }
    const pre = document.createElement("pre");
    pre.textContent = type.startsWith("application/json") ? JSON.stringify(JSON.parse(text), null, 2) : text;
    document.title = `${location.pathname} · Treadle`;
    document.querySelector(".ask").replaceWith(pre);
    pre.className = "whole";
    for (const id of ["pages", "forget"]) document.getElementById(id).hidden = false;
  }

  async function open(given, wrong) {
    form.hidden = true;
    tell("Asking the server …", false);
    let answer;
    try {
      answer = await get(address, "text/html, application/json;q=0.9, */*;q=0.8", given);
    } catch {
      return ask("The server does not answer. Try again.");
    }
    if (answer.status === 401) {
      forget();
      return ask(wrong);
    }
    keep(given);
    show(answer.headers.get("content-type") || "", await answer.text());
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = input.value.trim();
    if (given) open(given, "That is not this server's key. Try again.");
  });
  if (key()) open(key(), "The key that this tab kept no longer fits.");
  else ask("");
})();
