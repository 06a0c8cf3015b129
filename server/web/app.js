// The page: creates its parts and connects them.

import { Chat } from "./chat.js";
import { Conversation } from "./conversation.js";
import { h, icon, iconButton } from "./dom.js";
import { Drawers } from "./drawers.js";
import { count } from "./format.js";
import { Attachments } from "./files.js";
import { HistoryList } from "./history-list.js";
import { History, openStorage } from "./history.js";
import { picture } from "./images.js";
import { KeyDialog } from "./key-dialog.js";
import { ModelSwitch } from "./model-switch.js";
import { ModelWatch } from "./model-watch.js";
import { Models } from "./models.js";
import { Operator } from "./operator.js";
import { Parameters } from "./parameters.js";
import { Scroller } from "./scroller.js";
import { Server } from "./server.js";
import { chooseTheme } from "./theme.js";
import { Toast } from "./toast.js";
import { Transcript } from "./transcript.js";
import { Views } from "./views.js";

const DEMO_MODEL = "tidewheel-demo";
const DEMO_PROMPTS = [
  "Who are you?", "What is 47 + 38?", "How do I serve another model?", "Tell me a story about a lamp",
];
const ANNOUNCED_BLOCKS = 20;
const LOADING_MS = 500;
const LOADED_MS = 3000;

const get = (id) => document.getElementById(id);
let shownModel = "{}"; // none
const prompt = get("prompt");
const local = openStorage("localStorage");
const server = new Server(openStorage("sessionStorage"));
const history = new History(local);
const parameters = new Parameters(get("parameters"), local);
const toast = new Toast(get("toast"));
const modelSwitch = new ModelSwitch(
  { button: get("models-button"), panel: get("models"), list: get("models-list"), search: get("models-search") },
  {
    choose: (id) => models.choose(id),
    load: (id) => manage("load", id),
    unload: (id) => manage("unload", id),
    open: () => modelWatch.poke(),
  },
);
const models = new Models(get("model"), modelSwitch, local, () => {
  chat.useModel();
  showModel();
});
const modelWatch = new ModelWatch(readModels, howLongModelsAreGood);
const operator = new Operator(server, models);
const scroller = new Scroller(get("scroller"), get("turns"), get("to-latest"));
const transcript = new Transcript(get("turns"), {
  edit: (message, text) => ask(() => chat.edit(message, text)),
  regenerate: (message) => ask(() => chat.regenerate(message)),
  choose: (message) => chat.choose(message),
  giveResults: (results) => ask(() => chat.giveResults(results)),
}, announce);
const chat = new Chat(
  { history, models, parameters, scroller, server, transcript },
  {
    onChange: showState,
    onOpen: ({ model }) => {
      if (!models.follow(model)) toast.show(`${model} is not served any more: ${models.current.id} answers here.`);
      showModel();
    },
    onFailure: fail,
    onUnkept: () => toast.show("This browser has no room to keep the conversation."),
  },
);
const historyList = new HistoryList(
  {
    list: get("conversations"), search: get("search"), deleteAll: get("delete-all"), exportAll: get("export-all"),
    importButton: get("import"), importInput: get("import-file"), fallback: get("new"),
  },
  { history, chat, toast },
  () => {
    views.toChat();
    drawers.uncover();
  },
);
const attachments = new Attachments(
  get("attachments"), showAttachment, () => models.seesImages, (words) => toast.show(words),
);
const drawers = new Drawers(get("app"), [get("main"), get("skip")], [
  { element: get("history"), toggle: get("history-toggle"), room: "(min-width: 56rem)" },
  { element: get("panel"), toggle: get("panel-toggle"), room: "(min-width: 76rem)" },
]);
const views = new Views(
  {
    chat: [get("scroller"), get("composer"), get("context"), get("panel")],
    operator: get("operator"), toChat: get("to-chat"), toServer: get("to-server"),
  },
  (shown) => {
    operator.open = shown;
    modelWatch.poke();
  },
);
const keyDialog = new KeyDialog(
  {
    dialog: get("key-dialog"), form: get("key-form"), input: get("key"), note: get("key-note"),
    cancel: get("key-cancel"),
  },
  server, showKey,
);

get("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.busy) chat.stop();
  else send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fitPrompt);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !get("key-dialog").open && !modelSwitch.isOpen) chat.stop();
});
get("attach").addEventListener("click", () => get("attach-files").click());
get("attach-files").addEventListener("change", async () => {
  await attachments.add(get("attach-files").files);
  get("attach-files").value = "";
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") attachments.add(event.dataTransfer.files);
  });
}
prompt.addEventListener("paste", (event) => {
  // Programs that copy tables or text add a picture of it.
  const { files, types } = event.clipboardData;
  if (!files.length || types.includes("text/plain")) return;
  event.preventDefault();
  attachments.add(files);
});
chooseTheme(get("theme"), local);
get("new").addEventListener("click", () => {
  views.toChat();
  chat.open(Conversation.create());
  drawers.uncover();
  focusPrompt();
});
get("forget-key").addEventListener("click", () => {
  server.key = "";
  showKey();
});
get("parameters").addEventListener("fault", () => drawers.open(get("panel")));
window.addEventListener("pagehide", () => chat.busy && chat.keep());

showState();
showKey();
load();
server.version().then((version) => (get("version").textContent = `Tidewheel ${version}`), () => {});
focusPrompt();

async function load() {
  try {
    await listModels();
    modelWatch.plan();
  } catch (error) {
    models.list([]);
    showModel();
    fail(error, load);
  }
}

async function listModels() {
  models.list(await server.models());
  showModel();
}

async function readModels() {
  if (models.areLoadedOnDemand) await listModels();
}

/** For how many milliseconds the states of models are good; null if nobody needs them. */
function howLongModelsAreGood() {
  if (!models.areLoadedOnDemand) return null;
  if (models.isAnyLoading || (chat.busy && models.current.status.value !== "loaded")) return LOADING_MS;
  return modelSwitch.isOpen || operator.isOpen ? LOADED_MS : null;
}

/** Loads or unloads a model, and shows the states meanwhile. */
async function manage(action, id) {
  const done = server.manageModel(action, id);
  modelWatch.poke();
  try {
    await done;
  } catch (error) {
    if (error.status === 401) keyDialog.ask(() => manage(action, id));
    else toast.show(error.message);
    if (error.status === 403) models.refuse(action);
  }
  modelWatch.poke();
}

function send() {
  if (chat.busy || !chat.send(prompt.value, attachments.chosen)) return;
  attachments.clear();
  prompt.value = "";
  fitPrompt();
}

function showAttachment(file, remove) {
  const thumbnail = file.url ? [picture(file)] : [];
  return h("li", {}, ...thumbnail, h("span", {}, file.name), iconButton("close", `Remove ${file.name}`, remove));
}

/** Sends a request by `act`, and moves the focus to where messages are written. Returns whether it was sent. */
function ask(act) {
  const asked = act();
  if (asked) focusPrompt();
  return asked;
}

/** Focuses the input for messages, but not on a phone, where a keyboard would cover the answer. */
function focusPrompt() {
  if (window.matchMedia("(hover: hover)").matches) prompt.focus({ preventScroll: true });
}

function fail(error, retry) {
  if (error.status === 401) keyDialog.ask(retry);
  else if (!chat.conversation.messages.length) toast.show(error.message, { label: "Try again", act: retry });
  else if (error.param) parameters.refuse(error.param, error.message);
}

function showState() {
  document.body.classList.toggle("busy", chat.busy);
  const label = chat.busy ? "Stop" : "Send";
  get("send").replaceChildren(icon(chat.busy ? "stop" : "send"));
  get("send").setAttribute("aria-label", label);
  get("send").title = label;
  get("empty").hidden = chat.conversation.messages.length > 0;
  if (chat.busy) get("announcer").replaceChildren();
  historyList.show();
  showContext();
  operator.poke();
  modelWatch.poke();
}

function showModel() {
  const { status, ...model } = models.current ?? {};
  operator.showModels();
  if (JSON.stringify(model) === shownModel) return;
  shownModel = JSON.stringify(model);
  const { id, max_model_len: room } = model;
  const where = models.writesText
    ? `${id} answers here${room ? `, with ${count(room)} tokens of context` : ""}.`
    : `${id} writes no text: programs ask it for embeddings, scores or classes.`;
  get("empty-note").textContent = `${where} What you write goes to this server and nowhere else.`;
  get("suggestions").replaceChildren(...(id === DEMO_MODEL ? DEMO_PROMPTS : []).map((text) =>
    h("li", {}, h("button", { type: "button", onclick: () => ask(() => chat.send(text)) }, text))));
  const attach = models.seesImages ? "Add images or text files" : "Add text files";
  get("attach").setAttribute("aria-label", attach);
  get("attach").title = attach;
  showContext();
}

function showContext() {
  const used = chat.conversation.messages.findLast((message) => message.usage)?.usage.total_tokens;
  const most = models.current?.max_model_len;
  get("context").textContent = used && most ? `${count(used)} of ${count(most)} tokens` : "";
}

function showKey() {
  get("key-state").hidden = !server.key;
  models.refuse(); // until this key was refused
}

/** Lets a screen reader read new text, one block at a time. */
function announce(text) {
  get("announcer").append(h("p", {}, text));
  if (get("announcer").childElementCount > ANNOUNCED_BLOCKS) get("announcer").firstElementChild.remove();
}

function fitPrompt() {
  if (CSS.supports("field-sizing", "content")) return;
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}
