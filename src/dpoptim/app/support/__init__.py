"""What every part of training needs: whole files, optional packages, interrupts."""
