"""Ray Serve applications: build(args) -> Application, no work at import."""
