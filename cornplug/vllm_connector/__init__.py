"""vLLM plugin: the KV connector, the encoder-cache connector and the command-line flags.

vLLM calls `plugin.register` in each of its processes, and imports nothing else of this package before. No
other package of cornplug imports vLLM.
"""
