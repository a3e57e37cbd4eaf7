// Search, also from the disk: a browser starts no Worker there, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = frame.contentWindow
      inner.document.open()
      inner.document.write(
        "<script>postMessage = data => parent.postMessage(data, '*')</script>" +
          `<script src="${url}"></script>`,
      )
      inner.document.close()
      this.loaded = new Promise(done => frame.addEventListener("load", done))
      this.inner = inner
      addEventListener("message", event => {
        if (event.source === inner) {
          this.dispatchEvent(new MessageEvent("message", { data: event.data }))
        }
      })
    }

    async postMessage(data) {
      await this.loaded
      this.inner.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
