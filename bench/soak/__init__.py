"""Long loads with operations beside them."""
