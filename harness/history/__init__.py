"""How every cell did from night to night: records, nights, steps, and a page of them."""
