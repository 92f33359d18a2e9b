// The console: starts the three views, shows the one that the address names, and asks for the key.

import { Api } from "./api.js";
import { ChatView } from "./chat.js";
import { announce, ask, notify, setText } from "./dom.js";
import { LiveFeed } from "./feed.js";
import { Killer } from "./killer.js";
import { LiveView } from "./live.js";
import { RequestsView } from "./requests.js";

const get = (id) => document.getElementById(id);

async function askForKey(refused) {
  const dialog = get("key-dialog");
  const input = get("key-input");
  input.value = "";
  setText(get("key-error"), refused ? "The server refused this key: it is unknown or expired." : "");
  const answer = await ask(dialog);
  const key = input.value.trim();
  input.value = "";
  if (answer !== "use" || !key) return null;
  get("key-button").hidden = false;
  return key;
}

const api = new Api(askForKey);
const feed = new LiveFeed(api);
const killer = new Killer(api);
const parts = { api, feed, killer };
const views = { chat: new ChatView(parts), live: new LiveView(parts), requests: new RequestsView(parts) };
let shown = null;

function showView() {
  const name = location.hash.slice(1) in views ? location.hash.slice(1) : "chat";
  if (name === shown) return;
  views[shown]?.hide();
  const moved = shown !== null;
  shown = name;
  for (const other of Object.keys(views)) get(`view-${other}`).hidden = other !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const title = name[0].toUpperCase() + name.slice(1);
  document.title = `${title} – Headrace`;
  if (moved) announce(title);
  views[name].show();
}

function showTheme() {
  get("theme-button").setAttribute("aria-pressed", String(document.documentElement.dataset.theme === "dark"));
}

get("theme-button").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("headrace-theme", theme);
  document.documentElement.dataset.theme = theme;
});
new MutationObserver(showTheme).observe(document.documentElement, { attributeFilter: ["data-theme"] });
get("key-cancel").addEventListener("click", () => get("key-dialog").close(""));
get("key-button").hidden = !api.hasKey;
get("key-button").addEventListener("click", () => {
  api.forgetKey();
  get("key-button").hidden = true;
  notify("The key is forgotten.");
});
addEventListener("hashchange", showView);
showTheme();
showView();
