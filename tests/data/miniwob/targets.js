// For each task: the elements that answer the instruction, each with the words that name it, as
// [element, words] pairs. More than one pair means that the instruction is ambiguous on that page,
// and render.py drops it. The comparisons are looser than the tasks' own (letter case, punctuation)
// for that reason.
const all = (selector) => [...document.querySelectorAll(selector)];
const text = (element) => element.textContent.trim();
const plain = (string) => string.toLowerCase().replace(/[^a-z0-9]/g, "");
const same = (a, b) => plain(a) === plain(b);
const named = (kind, elements) => elements.map((e) => [e, `the "${text(e)}" ${kind}`]);

// A shape, letter or digit of common/shapes.js, described by what is drawn.
function describeShape(element) {
  const tag = element.tagName;
  const width = tag === "text" ? parseFloat(element.getAttribute("font-size")) : element.getBBox().width;
  const name = { rect: "rectangle", circle: "circle", polygon: "triangle" }[tag] ?? text(element);
  const kind = tag !== "text" ? "shape" : /\d/.test(name) ? "digit" : "letter";
  return { size: width > 15 ? "large" : "small", color: element.getAttribute("fill"), name, kind };
}

// Does the shape fit words such as "large red digit", "blue item" or "small k"?
function shapeFits(shape, words) {
  const noun = words[words.length - 1];
  const nounFits = noun === "item" || noun === shape.kind || same(noun, shape.name);
  return nounFits && words.slice(0, -1).every((word) => word === shape.size || word === shape.color);
}

const TARGETS = {
  "click-test": () => named("button", all("#subbtn")),

  "click-test-2": () => named("button", all("#subbtn")),

  // The first of two clicks.
  "click-button-sequence": () => named("button", all("#subbtn")),

  "click-button": (query) => {
    const wanted = query.match(/"(.*)"/)[1];
    return named("button", all("#area button").filter((e) => same(text(e), wanted)));
  },

  "click-link": (query) => {
    const wanted = query.match(/"(.*)"/)[1];
    const links = all("#area .alink").filter((e) => same(text(e), wanted));
    return links.map((e) => [e, `the link "${text(e)}"`]);
  },

  "click-dialog": () => all(".ui-dialog-titlebar button").map((e) => [e, 'the "x" of the dialog']),

  "click-dialog-2": (query) => {
    const wanted = query.match(/"(.*)"/)[1];
    if (wanted === "x") return TARGETS["click-dialog"]();
    return named("button of the dialog", all(".ui-dialog-buttonset button").filter((e) => text(e) === wanted));
  },

  "click-tab": (query) => {
    const wanted = query.match(/Tab #\d/)[0];
    return all("#area li").filter((e) => text(e) === wanted).map((e) => [e, `the tab "${wanted}"`]);
  },

  // The first of two clicks; the second is the Submit button.
  "click-option": (query) => {
    const wanted = query.match(/^Select (.*) and click Submit/)[1];
    return named("option", all("#area label").filter((e) => same(text(e), wanted)));
  },

  "click-widget": (query) => {
    const type = query.match(/"(.*)"/)[1];
    return all(`#area [data-type="${type}"]`).map((e) => {
      if (type === "radio" || type === "checkbox") {
        const label = e.closest("label");
        return [label, `the ${type === "radio" ? "radio button" : type} "${text(label)}"`];
      }
      if (type === "button") return [e, `the "${text(e)}" button`];
      return [e, `the ${type === "text" ? "text field" : "text area"} that says "${e.value}"`];
    });
  },

  "click-color": (query) => {
    const color = query.match(/the (\w+) colored/)[1];
    return all(`#area .color[data-color="${color}"]`).map((e) => [e, `the ${color} box`]);
  },

  "click-shape": (query) => {
    const words = query.replace("Click on a ", "").split(" ");
    const phrase = words.map((word) => (word.length === 1 ? `"${word}"` : word)).join(" ");
    const fitting = all("#area_svg > *").filter((e) => shapeFits(describeShape(e), words));
    return fitting.map((e) => [e, `the ${phrase}`]);
  },

  "identify-shape": () => {
    const shape = describeShape(document.querySelector("#area_svg > *"));
    const type = shape.kind === "shape" ? shape.name : shape.kind;
    return named("button", all(`#area-buttons [data-type="${type}"]`));
  },

  "focus-text": () => all("#tt").map((e) => [e, "the text field"]),

  "focus-text-2": (query) => {
    const position = query.match(/(\d)\w\w input/)[1];
    return all(`#tt${position}`).map((e) => [e, `text field number ${position}`]);
  },

  "grid-coordinate": (query) => {
    const point = query.match(/\(.*\)/)[0];
    return all("#area circle").filter((e) => e.id === point).map((e) => [e, `the point ${point}`]);
  },

  "email-inbox-delete": (query) => {
    const sender = query.match(/email by (.*) and click/)[1];
    const emails = all("#main .email-thread").filter((e) => same(text(e.querySelector(".email-sender")), sender));
    return emails.map((e) => [e.querySelector(".trash"), `the trash icon of the email from ${sender}`]);
  },
};

// The rectangle of an element; a label's own is that of its line of text and cuts its button off.
function boxOf(element) {
  if (!element.matches("label")) return element.getBoundingClientRect();
  const contents = document.createRange();
  contents.selectNodeContents(element);
  return contents.getBoundingClientRect();
}

// A target is usable when it can be seen whole, is one rectangle of some size, and nothing else lies
// over it. The corners of round or three-sided shapes belong to their parent, so that counts as the target.
function usable(element) {
  if (element.matches(".alink") && element.getClientRects().length > 1) return false; // broken over two lines
  const { left, top, right, bottom } = boxOf(element);
  if (left < 0 || top < 50 || right > 160 || bottom > 210) return false;
  if (right - left < 6 || bottom - top < 6) return false;
  for (const u of [0.1, 0.3, 0.5, 0.7, 0.9]) {
    for (const v of [0.1, 0.3, 0.5, 0.7, 0.9]) {
      const hit = document.elementFromPoint(left + u * (right - left), top + v * (bottom - top));
      if (!hit || !(element.contains(hit) || hit === element.parentElement)) return false;
    }
  }
  return true;
}

// The page as render.py wants it: the instruction and, where it has exactly one good answer, the target.
function readPage(task) {
  const instruction = core.getUtterance();
  const targets = TARGETS[task](instruction);
  if (targets.length !== 1 || !usable(targets[0][0])) return { instruction, box: null, phrase: null };
  const { left, top, right, bottom } = boxOf(targets[0][0]);
  return { instruction, box: [left, top, right, bottom].map(Math.round), phrase: targets[0][1] };
}
