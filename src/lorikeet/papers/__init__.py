"""Systems of published papers: one room for each, with its policies, its presets and a page.

They are plug-ins like those of other packages (docs/plugins.md): the entry points in pyproject.toml name them, they
import only what other packages may import, and nothing in the product imports them.
"""
