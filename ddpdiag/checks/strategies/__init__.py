"""TRN002: training by several strategies."""
