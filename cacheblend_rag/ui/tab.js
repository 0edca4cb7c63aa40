() => {
    // A tab keeps its conversation when it is loaded again, and shares it with no other: sessionStorage is the tab's own.
    const entry = performance.getEntriesByType("navigation")[0];
    let id = sessionStorage.getItem("cacheblend-tab");
    if (!id || !entry || entry.type === "navigate") {
        id = Array.from(crypto.getRandomValues(new Uint8Array(16)), byte => byte.toString(16).padStart(2, "0")).join("");
        sessionStorage.setItem("cacheblend-tab", id);
    }
    return [id, window.innerWidth >= 1000];
}
