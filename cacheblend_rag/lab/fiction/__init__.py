"""A fictional world whose documents refer to one another, and questions that cannot be answered without following them."""
