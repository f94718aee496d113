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

  // The entries that say most of the text, best first: whole ones, or else those that share a part.
  search(entries, pasted) {
    const text = this.plain(pasted);
    const scored = entries.map((entry) => ({ entry, ...this.score(entry.message, text) }));
    const whole = scored.filter((one) => one.whole && one.found > 3);
    const best = Math.max(0, ...whole.map((one) => one.found));
    const some = scored.filter((one) => !one.whole && one.found > Math.max(11, best));
    return [...whole.filter((one) => 2 * one.found >= best), ...some]
      .sort((one, other) => other.found - one.found || other.whole - one.whole)
      .slice(0, this.most)
      .map((one) => one.entry);
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
