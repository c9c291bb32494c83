"use strict";
// The form: what is asked goes to the worker, one question at a time; the page that it answers is shown in a frame.

const llama = values => ({ model_type: "llama", vocab_size: 128256, num_key_value_heads: 8, max_position_embeddings: 131072,
  tie_word_embeddings: false, ...values });
const EXAMPLES = {
  "Llama 3.1 8B": llama({ hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32 }),
  "Llama 3.1 70B": llama({ hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, num_attention_heads: 64 }),
  "Llama 3.1 405B": llama({ hidden_size: 16384, intermediate_size: 53248, num_hidden_layers: 126, num_attention_heads: 128 }),
  "Qwen 2.5 32B": { model_type: "qwen2", vocab_size: 152064, hidden_size: 5120, intermediate_size: 27648, num_hidden_layers: 64,
    num_attention_heads: 40, num_key_value_heads: 8, max_position_embeddings: 131072, tie_word_embeddings: false },
  "Mixtral 8×7B": { model_type: "mixtral", vocab_size: 32000, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32,
    num_attention_heads: 32, num_key_value_heads: 8, num_local_experts: 8, num_experts_per_tok: 2, max_position_embeddings: 32768 },
  "GPT-2 XL": { model_type: "gpt2", n_layer: 48, n_embd: 1600, n_head: 25, n_positions: 1024, vocab_size: 50257 },
};
const GROUPS = { gpu: "a GPU, in the first machine that has it", azure: "Azure", aws: "AWS", gcp: "Google Cloud", site: "other machines" };

const form = document.forms[0], fields = form.elements, status = document.getElementById("status");
const refusal = document.getElementById("refusal"), frame = document.getElementById("page"), save = document.getElementById("save");
const worker = new Worker(`worker.js${location.search}`, { type: "module" });
let busy = true, waiting = false, ready = false;

function say(state, text) {
  status.dataset.state = state;
  status.textContent = text;
}

function options(select, groups) {
  for (const [title, entries] of groups) {
    const group = Object.assign(document.createElement("optgroup"), { label: title });
    group.append(...entries.map(([value, text]) => new Option(text, value)));
    select.append(group);
  }
}

function ask() {
  if (!ready || !form.reportValidity()) return;
  if (busy) { waiting = true; return; }
  busy = true;
  say("busy", "Planning …");
  worker.postMessage(Object.fromEntries(new FormData(form)));
}

function show({ page, plan, error }) {
  refusal.hidden = !error;
  refusal.replaceChildren(...(error || []).map((text, at) => Object.assign(document.createElement("p"), {
    className: ["value", "rule", "remedy"][at], textContent: text })));
  frame.hidden = save.hidden = !page;
  frame.srcdoc = page;
  URL.revokeObjectURL(save.href);
  save.href = URL.createObjectURL(new Blob([page], { type: "text/html" }));
  window.plan = plan; // for the console, and for tests
}

frame.addEventListener("load", () => {
  const inside = frame.contentDocument.documentElement;
  const grow = () => { frame.style.height = `${inside.querySelector("body").scrollHeight + 2}px`; };
  new ResizeObserver(grow).observe(inside.querySelector("body"));
  grow();
});

worker.onerror = event => say("failed", event.message || "the worker did not start");
worker.onmessage = ({ data }) => {
  if (data.state) return say("loading", data.state);
  if (data.choices) {
    const of = cloud => data.choices.machines.filter(([, group]) => group === cloud).map(([name, , title]) => [name, title]);
    options(fields.machine, Object.entries(GROUPS).map(([cloud, title]) => [title, of(cloud)]));
    fields.machine.value = "H100 80GB HBM3";
    options(fields.example, [["a type, with the defaults of transformers", data.choices.types.map(type => [type, type])]]);
    form.querySelector("button").disabled = false;
    [ready, busy] = [true, false];
    return ask();
  }
  busy = false;
  if (data.failed) return say("failed", data.failed);
  show(data.answer);
  say("answered", `Answered in ${data.seconds.toFixed(1)} s.`);
  status.dataset.seconds = data.seconds;
  if (waiting) { waiting = false; ask(); }
};

function example() {
  fields.config.value = JSON.stringify(EXAMPLES[fields.example.value] || { model_type: fields.example.value }, null, 2);
}

async function read(file) {
  fields.config.value = await file.text();
  fields.example.value = "";
  ask();
}

options(fields.example, [["published models", Object.keys(EXAMPLES).map(name => [name, name])]]);
fields.example.value = "Llama 3.1 70B";
example();
fields.example.addEventListener("change", example);
fields.config.addEventListener("input", () => { fields.example.value = ""; });
fields.file.addEventListener("change", () => fields.file.files[0] && read(fields.file.files[0]));
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => {
  event.preventDefault();
  if (event.dataTransfer.files[0]) read(event.dataTransfer.files[0]);
});
form.addEventListener("change", event => event.target !== fields.file && ask());
form.addEventListener("submit", event => { event.preventDefault(); ask(); });
