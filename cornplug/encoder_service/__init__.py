"""cornplug's encoder service. One vision or audio tower serves all engines, apps and models that use this
tower."""
