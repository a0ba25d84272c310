"""vLLM plugin: the KV connector, the encoder-cache connector and the command-line flags.

vLLM calls `plugin.register` in each of its processes before it imports anything else from this package.
No other package of cornplug imports vLLM.
"""
