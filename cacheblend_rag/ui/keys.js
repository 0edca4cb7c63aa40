document.addEventListener("keydown", event => {
    const question = document.querySelector("#cb-question textarea");
    if (!question || event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
    if (event.key === "/" && !typing) {
        event.preventDefault();
        question.focus();
    }
    if (event.key === "Escape") document.querySelector("#cb-question .stop-button")?.click();
});
