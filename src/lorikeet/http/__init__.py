"""Transport of the server and the router: connections, TLS, errors, middleware, streaming, helper processes, pages."""
