// Begins the page: tabs, theme, key, and the connection that the visible view needs.

import { CallError, ask, hasKey, setKey } from "./api.js";
import { byId, showOptions, showTip } from "./dom.js";
import { Live } from "./live.js";
import { MemoryView } from "./memory.js";
import { Playground } from "./playground.js";
import { recall, remember } from "./storage.js";
import { StepsView } from "./steps.js";

const PARTS = {
  playground: null,
  memory: ["stats", "requests", "memory", "blocks", "prefixes", "events"],
  steps: ["stats", "events", "requests", "memory"],
};
const MODELS_MS = 3000; // between two looks at the models' states
const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

const live = new Live();
const views = {
  playground: new Playground(byId("playground")),
  memory: new MemoryView(byId("memory"), live),
  steps: new StepsView(byId("steps"), live),
};
let shown = "playground";
let hasStates = false; // whether the server has several models, which are loaded and unloaded

function show(name, focus = false) {
  shown = name;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const isShown = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
    if (isShown && focus) tab.focus();
    byId(tab.getAttribute("aria-controls")).hidden = !isShown;
  }
  showTip(null);
  history.replaceState(null, "", name === "playground" ? "/" : `#${name}`);
  follow();
}

function follow() {
  live.follow(document.hidden ? null : PARTS[shown], showModel());
}

/** Shows the chosen model's name in the bar, and returns it. */
function showModel() {
  const { model } = views.playground;
  byId("model").textContent = model;
  return model;
}

function connectTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => show(tab.id.slice(4)));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const seen = tabs.filter((each) => !each.hidden);
      const next = seen[(seen.indexOf(tab) + step + seen.length) % seen.length];
      show(next.id.slice(4), true);
    });
  }
}

function connectTheme() {
  const names = Object.keys(THEMES);
  let theme = recall("quire-theme");
  if (!names.includes(theme)) theme = "auto";
  const apply = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    byId("theme").textContent = THEMES[theme];
    byId("theme").setAttribute("aria-label", `Theme: ${theme === "auto" ? "as the system" : theme}`);
    views[shown].update?.();
  };
  byId("theme").addEventListener("click", () => {
    theme = names[(names.indexOf(theme) + 1) % names.length];
    remember("quire-theme", theme);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

function connectKey() {
  const dialog = byId("key-dialog");
  byId("key-button").addEventListener("click", () => {
    dialog.returnValue = ""; // Escape leaves the value of the last time
    dialog.showModal();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    const text = byId("key-input").value;
    byId("key-input").value = "";
    if (dialog.returnValue === "use") {
      setKey(text);
      begin();
    }
  });
}

/** Find out what this reader may see. */
async function begin() {
  byId("key-button").textContent = hasKey() ? "Key set" : "Key";
  tell(null);
  try {
    const models = await ask("/v1/models");
    views.playground.setModels(models.data);
    hasStates = models.data.some((each) => each.state);
  } catch (error) {
    if (error instanceof CallError && error.status === 401) {
      tell(hasKey() ? "The server does not know this key." : "This server needs a key: enter yours with the button Key.");
    } else tell("The server does not answer.");
  }
  let isOperator = true;
  try { await ask("/stats?parts=stats"); } catch (error) { isOperator = !(error.status === 401 || error.status === 403); }
  for (const name of ["memory", "steps"]) byId(`tab-${name}`).hidden = !isOperator;
  const wanted = location.hash.slice(1);
  show(isOperator && wanted in PARTS ? wanted : isOperator ? shown : "playground");
}

function tell(text) {
  byId("banner").hidden = text === null;
  byId("banner").textContent = text ?? "";
}

function chooseEngine() {
  const names = [...live.engines.keys()];
  byId("engine-choice").hidden = names.length < 2;
  const select = byId("engine");
  showOptions(select, names.map((name) => [name, name]));
  if (names.includes(live.chosen)) select.value = live.chosen;
}

/** Shows which model the views Memory and Steps show, and says so if it is not in memory. */
function chooseModel() {
  const { model, models = [], state } = live.server ?? {};
  const isWatched = shown !== "playground";
  byId("shown-choice").hidden = !isWatched || models.length < 2;
  showOptions(byId("shown"), models.map((each) => [each.name, `${each.name} (${each.state})`]));
  if (models.length) byId("shown").value = model;
  const isEmpty = isWatched && live.state === "open" && live.engines.size === 0;
  for (const name of ["memory", "steps"]) byId(name).classList.toggle("no-engine", isEmpty);
  byId("not-loaded").hidden = !isEmpty;
  if (isEmpty) byId("not-loaded").textContent = `The model ${model} is ${state}. A call that names it loads it.`;
}

/** Keep the states in the playground's list of models. */
async function followModels() {
  if (!hasStates || document.hidden || shown !== "playground") return;
  try { views.playground.setModels((await ask("/v1/models")).data); } catch { /* the next look may succeed */ }
}

byId("engine").addEventListener("change", (event) => { live.chosen = event.target.value; views[shown].update?.(); });
byId("set-model").addEventListener("change", showModel);
byId("shown").addEventListener("change", (event) => { byId("set-model").value = event.target.value; follow(); });
document.addEventListener("visibilitychange", follow);
setInterval(followModels, MODELS_MS);
let lastState = null;
live.onUpdate(() => {
  if (live.state !== lastState) {
    const texts = { open: "live", lost: "reconnecting…", refused: "refused", closed: "" };
    byId("connection").textContent = texts[live.state];
    byId("connection").dataset.state = live.state;
    if (lastState === "lost") tell(null);
    lastState = live.state;
  }
  if (live.state === "lost") tell(live.problem ?? "The server does not answer; the page asks again.");
  chooseEngine();
  chooseModel();
  views[shown].update?.();
});
connectTabs();
connectTheme();
connectKey();
begin();
