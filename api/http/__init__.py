"""The HTTP API: ``app.make_app`` builds it, ``api.serving`` runs it."""
