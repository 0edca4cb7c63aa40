"""Shows a chat over documents in the browser: a page on Gradio, thin over `RagPipeline`."""
