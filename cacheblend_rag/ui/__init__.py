"""Shows a chat over documents in the browser, with a Gradio page on top of `RagPipeline`.

``workspace.py`` loads the model in a thread, once for all tabs; the page appears before torch is imported.
"""
