// The planner in a web worker, so that the page does not freeze: Python, its packages, hpc_mp, then an answer to each form.
const CDN = "https://cdn.jsdelivr.net/pyodide/v314.0.7/full/";
const PACKAGES = ["pydantic", "jinja2", "tomli-w", "click", "rich"];

const named = new URL(location).searchParams.get("pyodide"); // a folder of this site, in place of the CDN
const folder = named ? new URL(named, location).href : CDN;
const say = state => postMessage({ state });

async function start() {
  if (named && new URL(folder).origin !== location.origin) throw new Error("?pyodide= must name a folder of this site");
  const archive = fetch(new URL("hpc_mp.zip", location));
  say("Loading Python (some 15 MB, once) …");
  const { loadPyodide } = await import(`${folder}pyodide.mjs`);
  const python = await loadPyodide({ indexURL: folder });
  say("Loading packages …");
  await python.loadPackage(PACKAGES, { messageCallback: () => {}, errorCallback: console.error });
  say("Loading the planner …");
  const answered = await archive;
  if (!answered.ok) throw new Error(`hpc_mp.zip: ${answered.status} ${answered.statusText}`);
  python.unpackArchive(await answered.arrayBuffer(), "zip", { extractDir: "/planner" });
  python.runPython("import sys; sys.path.insert(0, '/planner')");
  return python.pyimport("answer");
}

const planner = start();
planner.then(module => postMessage({ choices: JSON.parse(module.choices()) }), error => postMessage({ failed: String(error) }));
onmessage = async ({ data }) => {
  try {
    const module = await planner, before = performance.now();
    const answer = JSON.parse(module.answer(JSON.stringify(data)));
    postMessage({ answer, seconds: (performance.now() - before) / 1000 });
  } catch (error) {
    postMessage({ failed: String(error) });
  }
};
