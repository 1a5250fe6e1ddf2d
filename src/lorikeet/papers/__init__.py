"""Contains the systems of published papers: a package for each, with its policies, its presets and a page.

The packages are plug-ins like those of other projects (docs/plugins.md). The entry points in pyproject.toml name the
packages, which import only what other plug-ins may import. The rest of the product never imports them.
"""
