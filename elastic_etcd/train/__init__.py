"""What training scripts import, and what runs beside them: it is loaded with torch."""
