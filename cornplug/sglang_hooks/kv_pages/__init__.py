"""Layout, keys and copies of store pages in SGLang's host pools."""
