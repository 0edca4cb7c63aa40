"""Shows a chat over documents in the browser: a page on Gradio, thin over `RagPipeline`.

``workspace.py`` loads the model in a thread, once for all tabs; the page is painted before torch is there.
"""
