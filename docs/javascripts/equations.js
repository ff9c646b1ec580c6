// Renders the equations that pymdownx.arithmatex marks: \(…\) in a line, \[…\] on a line of its own.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim()
    katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false })
  }
})
