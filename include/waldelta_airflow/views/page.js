// Keeps a page in Airflow's theme and up to date: times count, and what changed on the server is replaced, but for
// what the reader opened, filled in or stands in. A page works without it, and reloads itself then.
const root = document.documentElement;

// Airflow keeps the reader's choice in localStorage; other documents get a change of it as an event.
function followTheme() {
  const theme = localStorage.getItem("theme");
  if (["light", "dark"].includes(theme)) root.dataset.theme = theme;
  else delete root.dataset.theme;
}
followTheme();
addEventListener("storage", followTheme);

const UNITS = [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]];
function duration(seconds) {
  for (const [unit, size, smaller, part] of UNITS) {
    if (seconds < size) continue;
    const rest = seconds < 10 * size ? Math.floor((seconds % size) / part) : 0;
    return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${smaller}` : ""}`;
  }
  return `${Math.floor(seconds)} s`;
}

// The zone that the reader chose in Airflow, or else the browser's.
function zone() {
  try {
    const timeZone = localStorage.getItem("timezone")?.replaceAll('"', "") || undefined;
    return new Intl.DateTimeFormat("en", { timeZone }).resolvedOptions().timeZone;
  } catch {
    return undefined;
  }
}
const timeZone = zone();
const exact = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long", timeZone });
const parts = new Intl.DateTimeFormat("en-GB", { day: "2-digit", month: "2-digit", year: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", timeZone });

// A time by a form of strftime.
function format(at, form) {
  const { day: d, month: m, hour: H, minute: M, second: S } = Object.fromEntries(parts.formatToParts(at).map((part) => [part.type, part.value]));
  return form.replace(/%(.)/g, (_, letter) => ({ d, m, H, M, S })[letter]);
}

function clock(at, now) {
  const near = [[0, "today"], [-1, "yesterday"], [1, "tomorrow"]].find(([days]) => format(new Date(now.getTime() + days * 86400000), "%m%d") === format(at, "%m%d"));
  return `${near?.[1] ?? at.toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone })} ${format(at, "%H:%M")}`;
}

// The server's clock counts, also where the reader's is wrong.
let ahead = 0;
function tick() {
  const now = new Date(Date.now() - ahead);
  for (const time of document.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime), seconds = (now - at) / 1000;
    if (time.dataset.as === "clock") time.textContent = clock(at, now);
    else if (time.dataset.as === "exact") time.textContent = exact.format(at);
    else if (time.dataset.as === "since") time.textContent = duration(Math.max(0, seconds));
    else if (time.dataset.as) time.textContent = format(at, time.dataset.as);
    else time.textContent = seconds < 0 ? `in ${duration(-seconds)}` : `${duration(seconds)} ago`;
    const title = `${time.dataset.title ? `${time.dataset.title}, ` : ""}${exact.format(at)}`;
    if (time.title !== title) time.title = title;
  }
}

const isBusy = (node) => node.nodeType === 1 && (node === document.activeElement
  || (node.nodeName === "FORM" && (node.contains(document.activeElement)
    || [...node.elements].some((field) => field.checked !== field.defaultChecked || field.value !== field.defaultValue))));

// Makes a part of the page what the server has now.
function renew(shown, fresh) {
  if (isBusy(shown) || (shown.nodeName !== "TIME" && shown.isEqualNode(fresh))) return;
  const isOther = shown.nodeName !== fresh.nodeName || shown.nodeType !== fresh.nodeType;
  // A click that has begun must not press another form's button.
  if (isOther || (shown.nodeName === "FORM" && shown.getAttribute("action") !== fresh.getAttribute("action"))) {
    shown.replaceWith(fresh);
    return;
  }
  if (shown.nodeType !== 1) {
    shown.data = fresh.data;
    return;
  }
  for (const name of new Set([...shown.getAttributeNames(), ...fresh.getAttributeNames()])) {
    if (name === "open") continue; // The reader's choice.
    if (!fresh.hasAttribute(name)) shown.removeAttribute(name);
    else if (shown.getAttribute(name) !== fresh.getAttribute(name)) shown.setAttribute(name, fresh.getAttribute(name));
  }
  const before = [...shown.childNodes], after = [...fresh.childNodes];
  before.slice(after.length).forEach((node) => !isBusy(node) && node.remove());
  after.forEach((node, n) => (before[n] ? renew(before[n], node) : shown.append(node)));
}

// An answer that isn't a page of ours, such as a proxy's login, changes nothing; the next may be one.
const PARTS = ["header.top", "main"];
const pause = () => 1000 * (Number(document.body.dataset.every) || 60);

async function update() {
  if (!document.hidden) {
    const answer = await fetch(location.href, { headers: { accept: "text/html" } }).catch(() => null);
    if (answer?.ok && !answer.redirected) {
      const fresh = new DOMParser().parseFromString(await answer.text().catch(() => ""), "text/html");
      if (PARTS.every((part) => fresh.querySelector(part))) {
        for (const part of PARTS) renew(document.querySelector(part), fresh.querySelector(part));
        document.body.dataset.every = fresh.body.dataset.every ?? "";
        tick();
      }
    }
  }
  setTimeout(update, pause());
}

addEventListener("DOMContentLoaded", () => {
  ahead = Date.now() - new Date(document.body.dataset.now);
  tick();
  setInterval(tick, 1000);
  setTimeout(update, pause());
});
