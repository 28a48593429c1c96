/* A box at each run; the chosen runs make the command that compares them. */
const command = document.createElement("pre");
command.className = "command";
command.hidden = true;
document.querySelector("main").append(command);
for (const row of document.querySelectorAll("tr[data-path]")) {
  const box = document.createElement("input");
  box.type = "checkbox";
  box.ariaLabel = "compare " + row.cells[0].textContent;
  row.cells[0].prepend(box, " ");
  box.addEventListener("change", () => {
    row.toggleAttribute("data-chosen", box.checked);
    const paths = [...document.querySelectorAll("tr[data-chosen]")].map(chosen => chosen.dataset.path);
    command.hidden = !paths.length;
    command.textContent = ["lmtool report", ...paths].join(" ");
  });
}
