// Follows an answer that grows, unless the reader has scrolled away.

export function setUpScrolling(scroller, content, button) {
  const NEAR = 48;
  let follows = true;
  let last = 0;
  const distance = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  const toEnd = () => {
    follows = true;
    scroller.scrollTop = scroller.scrollHeight;
    last = scroller.scrollTop;
    button.hidden = true;
  };
  scroller.addEventListener("scroll", () => {
    // Only an upward move is the reader's: text that grows moves nothing up.
    if (scroller.scrollTop < last - 1 && distance() > NEAR) follows = false;
    else if (distance() <= NEAR) follows = true;
    last = scroller.scrollTop;
    button.hidden = follows || distance() <= NEAR;
  }, { passive: true });
  scroller.addEventListener("wheel", (event) => { if (event.deltaY < 0 && scroller.scrollTop > 0) follows = false; }, { passive: true });
  button.addEventListener("click", toEnd);
  const follow = () => { if (follows) toEnd(); else button.hidden = distance() <= NEAR; };
  new ResizeObserver(follow).observe(content);
  return { follow, toEnd };
}
