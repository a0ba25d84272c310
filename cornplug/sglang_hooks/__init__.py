"""SGLang with cornplug: found by its entry point, no edit of the engine.

The only room that imports `sglang`.
"""
