text => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
    link.download = "conversation.md";
    link.click();
    URL.revokeObjectURL(link.href);
}
