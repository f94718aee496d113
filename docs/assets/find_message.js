// The field of troubleshooting.html that takes a whole message and shows its entry. The entries
// lie in the page (docs/site_messages.py); `…` in one stands for anything.
"use strict";

const laurelMessages = {
  most: 5,

  plain(text) {
    return text.replace(/`/g, "").replace(/\s+/g, " ");
  },

  letters(text) {
    return (text.match(/\p{L}/gu) || []).length;
  },

  // How much of the entry the text has, in letters; and whether all of it, in order.
  score(entry, text) {
    let at = 0;
    let whole = true;
    let found = 0;
    for (const part of entry.split("…").map((one) => one.trim()).filter(Boolean)) {
      const next = text.indexOf(part, at);
      if (next >= 0) {
        at = next + part.length;
        found += this.letters(part);
      } else {
        whole = false;
        if (text.includes(part)) found += this.letters(part);
      }
    }
    return { found, whole };
  },

  words(text) {
    return text.toLowerCase().match(/[\p{L}\p{N}]+/gu) || [];
  },

  // The entries that have every word of a fragment, those first that have them one after the other.
  having(entries, text) {
    const words = this.words(text.replace(/^\s*error:/i, ""));
    if (words.length < 2 || this.letters(words.join("")) < 8) return [];
    const phrase = ` ${words.join(" ")} `;
    return entries
      .map((entry) => ({ entry, words: this.words(entry.message) }))
      .filter((one) => words.every((word) => one.words.includes(word)))
      .map((one) => ({ ...one, isRun: ` ${one.words.join(" ")} `.includes(phrase) }))
      .sort((one, other) => other.isRun - one.isRun || one.words.length - other.words.length)
      .map((one) => one.entry);
  },

  // The entries that say most of the text, best first: whole ones, or else those that share a part.
  // A fragment has no entry whole; its words are then looked for in the entries.
  search(entries, pasted) {
    const text = this.plain(pasted);
    const scored = entries.map((entry) => ({ entry, ...this.score(entry.message, text) }));
    const whole = scored.filter((one) => one.whole && one.found > 3);
    const best = Math.max(0, ...whole.map((one) => one.found));
    const some = scored.filter((one) => !one.whole && one.found > Math.max(11, best));
    const saying = [...whole.filter((one) => 2 * one.found >= best), ...some]
      .sort((one, other) => other.found - one.found || other.whole - one.whole)
      .map((one) => one.entry);
    const having = whole.length ? [] : this.having(entries, text);
    return [...new Set([...having, ...saying])].slice(0, this.most);
  },

  shown(entry) {
    const item = document.createElement("li");
    const message = item.appendChild(document.createElement("code"));
    message.textContent = entry.message;
    const text = item.appendChild(document.createElement("p"));
    text.innerHTML = entry.told; // written in these pages
    const link = text.appendChild(document.createElement("a"));
    link.href = entry.place;
    link.textContent = entry.section;
    return item;
  },

  start() {
    const box = document.getElementById("find-message");
    if (!box) return;
    const entries = JSON.parse(document.getElementById("messages").textContent);
    const field = box.querySelector("textarea");
    const list = box.querySelector("ol");
    const none = box.querySelector("p");
    field.addEventListener("input", () => {
      const found = this.search(entries, field.value);
      list.replaceChildren(...found.map((entry) => this.shown(entry)));
      none.hidden = found.length > 0 || field.value.trim() === "";
    });
    box.hidden = false;
  },
};

document.addEventListener("DOMContentLoaded", () => laurelMessages.start());
