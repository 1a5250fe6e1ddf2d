"""Routes of the API, one module a family. The application serves the ``ROUTES`` of every module."""
