"""cornplug inside vLLM: the KV connector, the encoder-cache connector and the flags.

vLLM calls `plugin.register` in each of its processes and imports nothing of this room before. No
other room imports vLLM.
"""
