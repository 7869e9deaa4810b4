// A question before something that cannot be taken back.

import { byId, text } from "./dom.js";

// Resolves to true for the button, to false for Cancel and Escape.
export function confirmed(question, details, button) {
  const dialog = byId("confirm");
  text(byId("confirm-question"), question);
  text(byId("confirm-details"), details);
  text(byId("confirm-yes"), button);
  dialog.returnValue = "";
  dialog.showModal();
  byId("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
