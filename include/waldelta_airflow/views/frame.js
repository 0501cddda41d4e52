// Airflow loads this module as the component of each view of the plugin. The component shows one of the plugin's
// pages in a frame. Airflow's own frame (external_views) allows no link to leave it, so that a page could lead to
// no DAG, run or log. In this one a click may.
const { createElement, useEffect, useState } = globalThis.React;
const { useLocation } = globalThis.ReactRouterDOM;

const root = new URL(".", import.meta.url);
const view = new URL(import.meta.url).searchParams.get("view");
const outer = new URL({ pipelines: "plugin/waldelta", "data-docs": "plugin/waldelta-data-docs" }[view] ?? "", document.baseURI);
const SANDBOX = "allow-scripts allow-same-origin allow-forms allow-downloads allow-top-navigation-by-user-activation";

function pageOf({ dagId, runId }) {
  const dag = `dag/${encodeURIComponent(dagId)}`;
  return { pipelines: "", "data-docs": "docs/", dag, run: `${dag}/run/${encodeURIComponent(runId)}` }[view];
}

// The page that Airflow's address names behind the view's own, as follow() wrote it, or else the view's first page.
function addressed(props) {
  const first = new URL(pageOf(props), root);
  if (!["pipelines", "data-docs"].includes(view)) return first.href;
  const { pathname, search, hash } = globalThis.location;
  const rest = pathname.startsWith(`${outer.pathname}/`) ? pathname.slice(outer.pathname.length + 1) : "";
  const page = rest ? new URL(root.href + rest + search + hash) : first;
  return page.href.startsWith(root.href) ? page.href : first.href;
}

// Airflow's address follows the page, so that a reload, a bookmark or a shared link leads to the same page.
function follow(event) {
  const { href } = event.currentTarget.contentWindow.location;
  if (!["pipelines", "data-docs"].includes(view) || !href.startsWith(root.href)) return;
  globalThis.history.replaceState(globalThis.history.state, "", `${outer.href}/${href.slice(root.href.length)}`);
}

globalThis.AirflowPlugin = function WaldeltaFrame(props) {
  const { key } = useLocation();
  const [shown, setShown] = useState({ key, src: addressed(props) });
  // A click on the entry of Airflow's navigation leads back to the view's first page.
  useEffect(() => {
    if (key !== shown.key) setShown({ key, src: addressed(props) });
  }, [key]);
  return createElement("iframe", {
    key: shown.key,
    onLoad: follow,
    sandbox: SANDBOX,
    src: shown.src,
    style: { border: "none", display: "block", height: "100%", width: "100%" },
    title: "waldelta",
  });
};
