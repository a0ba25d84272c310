"""SGLang plugin. SGLang loads it through an entry point, and SGLang itself is not changed.

No other package of cornplug imports `sglang`.
"""
