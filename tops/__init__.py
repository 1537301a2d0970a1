"""TOPS: content-based publish/subscribe whose publications can be grouped into transactions."""
