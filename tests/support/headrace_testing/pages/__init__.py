"""Write the pages of docs that are made from code; tests compare them."""
