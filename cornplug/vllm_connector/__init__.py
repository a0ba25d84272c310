"""cornplug inside vLLM: the KV connector, the encoder-cache connector and the flags.

`plugin.register` is what vLLM calls in each of its processes; nothing here is imported
before, and nothing outside this room imports vLLM.
"""
