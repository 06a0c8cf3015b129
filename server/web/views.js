// Switches between the chat and, at #server, the operator's view of the server.

export class Views {
  #chat;
  #operator;
  #links;
  #onChange;

  /** `chat` are the chat's elements. `onChange` is told whether the operator's view is shown. */
  constructor({ chat, operator, toChat, toServer }, onChange) {
    this.#chat = chat;
    this.#operator = operator;
    this.#links = [toChat, toServer];
    this.#onChange = onChange;
    window.addEventListener("hashchange", () => this.#show());
    this.#show();
  }

  toChat() {
    if (!this.#operator.hidden) location.hash = "#chat";
  }

  #show() {
    const server = location.hash === "#server";
    for (const element of this.#chat) element.hidden = server;
    this.#operator.hidden = !server;
    this.#links.forEach((link, i) => {
      if (server === Boolean(i)) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    });
    this.#onChange(server);
  }
}
