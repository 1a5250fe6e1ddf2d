"""The routes, one module a family. Every module has its ``ROUTES``, which the application serves."""
