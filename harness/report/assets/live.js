"use strict";
// A served page: loaded anew once its records have changed, at the same place.
{
  const version = `"${document.querySelector("meta[name=version]").content}"`;
  const top = (element) => element.getBoundingClientRect().top;
  history.scrollRestoration = "manual";
  const [id, at] = JSON.parse(sessionStorage.getItem("place") ?? "[]");
  sessionStorage.removeItem("place");
  const kept = id && document.getElementById(id);
  if (kept) scrollBy(0, top(kept) - at);
  setInterval(async () => {
    const answer = await fetch("/", { method: "HEAD", cache: "no-store" }).catch(() => null);
    if (!answer?.ok || answer.headers.get("ETag") === version) return;
    const parts = [...document.querySelectorAll("section[id], figure[id]")];
    const above = parts.filter((part) => part.offsetParent && top(part) <= 0).pop();
    if (above) sessionStorage.setItem("place", JSON.stringify([above.id, top(above)]));
    location.reload();
  }, 2000);
}
