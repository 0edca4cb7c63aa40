"""Trains REALM (arXiv 2002.08909): a retriever that learns what helps its encoder fill masks and find answers.

``passages.py`` and ``examples.py`` make what ``model.py`` learns from, in ``pretrain.py`` and ``finetune.py``; both run on
``runs.py``, which goes on after a kill, while ``refresh.py`` renews the index in a process of its own. ``reading.py`` answers.
No :class:`~cacheblend_rag.rag.pipeline.RagPipeline` can use what it makes: it is the paper's own.
"""
