"""SGLang plugin, loaded by its entry point without changes to SGLang.

This is the only package of cornplug that imports `sglang`.
"""
