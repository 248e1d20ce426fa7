// The pages: path patterns, the module and the style of each, and its letter after `g`. The first that matches is shown.
export const routes = [
  { path: "/", view: "home", nav: "Objects", key: "o", help: "objects" },
  { path: "/object/:kind/:name", view: "object" },
  { path: "/compare", view: "compare", nav: "Compare", key: "c", help: "compare jobs", css: "compare" },
  { path: "/job/:name", view: "job" },
  { path: "/job/:name/step/:step", view: "step", css: "step" },
  { path: "/job/:name/step/:step/group/:group", view: "step", css: "step" },
  { path: "/job/:name/step/:step/group/:group/sample/:sample", view: "step", css: "step" },
  { path: "/evaluations", view: "evaluations", nav: "Evaluations", key: "e", help: "evaluations", css: "step" },
  { path: "/evaluations/:name", view: "evaluations", css: "step" },
  { path: "/evaluations/:name/prompt/:prompt", view: "evaluations", css: "step" },
  { path: "/plan", view: "plan", nav: "Plan", key: "p", help: "plan and drift" },
  { path: "/top", view: "top", nav: "Top", key: "t", help: "top" },
  { path: "/weights", view: "weights", nav: "Weights", key: "w", help: "weights", css: "weights" },
  { path: "/sessions", view: "sessions", nav: "Sessions", key: "s", help: "sessions", css: "sessions" },
  { path: "/sessions/:name", view: "sessions", css: "sessions" },
  { path: "/sessions/:name/session/:session", view: "sessions", css: "sessions" },
  { path: "/agents/:name", view: "sessions", css: "sessions" },
  { path: "/agents/:name/session/:session", view: "sessions", css: "sessions" },
  { path: "/chat", view: "chat", nav: "Chat", key: "h", help: "chat", css: "chat" },
  { path: "/logs/:kind/:name", view: "logs", css: "logs" },
];

export function match(pathname) {
  for (const each of routes) {
    const params = fit(each.path.split("/"), pathname.replace(/\/+$/, "").split("/"));
    if (params) return { ...each, params };
  }
  return null;
}

function fit(pattern, path) {
  if (pattern.join("/") === "/" && path.join("") === "") return {};
  if (pattern.length !== path.length) return null;
  const params = {};
  for (let i = 0; i < path.length; i++) {
    if (pattern[i].startsWith(":")) {
      if (!path[i]) return null;
      try { params[pattern[i].slice(1)] = decodeURIComponent(path[i]); } catch { return null; }
    } else if (pattern[i] !== path[i]) return null;
  }
  return params;
}
