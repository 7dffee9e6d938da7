//! HTTP/1 client.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;

const TIMEOUT: Duration = Duration::from_secs(30);

/// A complete HTTP/1 response.
#[derive(Debug, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    /// All headers; `date` is the same at any time.
    pub headers: HeaderMap,
    pub body: String,
}

impl Response {
    /// The response without the white space between the tokens of its JSON, on which builds of etcd differ, and without what
    /// depends on its length.
    #[must_use]
    pub fn compact(mut self) -> Self {
        let is_json = self
            .headers
            .get("content-type")
            .is_some_and(|of| of == "application/json");
        if is_json {
            self.body = compact_json(&self.body);
            self.headers.remove("content-length");
            self.headers.remove("transfer-encoding");
        }
        self
    }
}

/// Makes `date` the same at any time, if it is a date.
pub(crate) fn without_time(headers: &mut HeaderMap) {
    if let Some(date) = headers.get_mut("date")
        && date.len() == "Thu, 01 Jan 1970 00:00:00 GMT".len()
        && date.as_bytes().ends_with(b" GMT")
    {
        *date = HeaderValue::from_static("now");
    }
}

/// JSON without the white space between its tokens.
#[must_use]
pub fn compact_json(text: &str) -> String {
    let (mut is_text, mut is_escaped) = (false, false);
    let is_kept = |character: &char| {
        if is_text {
            (is_text, is_escaped) = (is_escaped || *character != '"', !is_escaped && *character == '\\');
            return true;
        }
        is_text = *character == '"';
        !matches!(character, ' ' | '\t' | '\r' | '\n')
    };
    text.chars().filter(is_kept).collect()
}

/// `GET url`.
pub async fn get(url: &str) -> Result<Response, String> {
    call(Method::GET, url, None, String::new()).await
}

/// `GET url` with an `accept` header.
pub async fn get_accepting(url: &str, accept: &str) -> Result<Response, String> {
    call(Method::GET, url, Some(accept), String::new()).await
}

/// A request without a body, with any method.
pub async fn send(method: Method, url: &str) -> Result<Response, String> {
    call(method, url, None, String::new()).await
}

/// `POST url` with a JSON body.
pub async fn post(url: &str, body: &str) -> Result<Response, String> {
    call(Method::POST, url, None, body.to_owned()).await
}

/// `POST url` with a JSON body and an `authorization` header.
pub async fn post_as(url: &str, token: &str, body: &str) -> Result<Response, String> {
    let (authority, path) = split(url)?;
    let tcp = connect(authority).await?;
    let headers = [("accept", "*/*"), ("authorization", token)];
    exchange(tcp, Method::POST, authority, path, &headers, body.to_owned()).await
}

/// `POST url` with a JSON body and more headers.
pub async fn post_with(url: &str, more: &[(&str, &str)], body: &str) -> Result<Response, String> {
    let (authority, path) = split(url)?;
    let tcp = connect(authority).await?;
    let headers = [&[("accept", "*/*")], more].concat();
    exchange(tcp, Method::POST, authority, path, &headers, body.to_owned()).await
}

/// Lines of a response that does not end.
pub struct Lines {
    pub status: u16,
    pub headers: HeaderMap,
    body: hyper::body::Incoming,
    received: Vec<u8>,
    connection: tokio::task::JoinHandle<hyper::Result<()>>,
}

impl Lines {
    /// The next line, with its end.
    ///
    /// # Errors
    /// At the end of the response, or without a line in time.
    pub async fn next(&mut self) -> Result<String, String> {
        let receiving = async {
            loop {
                if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                    let rest = self.received.split_off(end + 1);
                    let line = std::mem::replace(&mut self.received, rest);
                    return Ok(String::from_utf8_lossy(&line).into_owned());
                }
                match self.body.frame().await {
                    Some(Ok(frame)) => self.received.extend(frame.into_data().unwrap_or_default()),
                    Some(Err(error)) => return Err(error.to_string()),
                    None => return Err("the response has ended".to_owned()),
                }
            }
        };
        let received = timeout(TIMEOUT, receiving).await;
        received.unwrap_or_else(|_| Err("no line".to_owned()))
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// `POST url` with a JSON body, of which the response is read line by line.
pub async fn post_for_lines(url: &str, body: &str) -> Result<Lines, String> {
    let (authority, path) = split(url)?;
    lines_over(connect(authority).await?, authority, path, &[], body).await
}

/// Sends a POST with a JSON body over a connected stream; the response is read line by line.
pub async fn lines_over<S>(
    stream: S,
    authority: &str,
    path: &str,
    more_headers: &[(&str, &str)],
    body: &str,
) -> Result<Lines, String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
    let connection = tokio::spawn(connection);
    let mut request = Request::post(path)
        .header("host", authority)
        .header("content-type", "application/json");
    for (name, value) in more_headers {
        request = request.header(*name, *value);
    }
    let request = request
        .body(Full::new(Bytes::from(body.to_owned())))
        .map_err(|e| e.to_string())?;
    let sending = timeout(TIMEOUT, sender.send_request(request)).await;
    let response = sending
        .map_err(|_| format!("{authority}: no answer"))?
        .map_err(|e| e.to_string())?;
    let (head, body) = response.into_parts();
    Ok(Lines {
        status: head.status.as_u16(),
        headers: head.headers,
        body,
        received: Vec::new(),
        connection,
    })
}

fn split(url: &str) -> Result<(&str, &str), String> {
    let rest = url.strip_prefix("http://").ok_or("only http:// is supported")?;
    Ok(rest.split_at(rest.find('/').unwrap_or(rest.len())))
}

async fn connect(authority: &str) -> Result<TcpStream, String> {
    let connected = TcpStream::connect(authority).await;
    connected.map_err(|error| format!("{authority}: {error}"))
}

async fn call(method: Method, url: &str, accept: Option<&str>, body: String) -> Result<Response, String> {
    let (authority, path) = split(url)?;
    let tcp = connect(authority).await?;
    let headers = [("accept", accept.unwrap_or("*/*"))];
    exchange(tcp, method, authority, path, &headers, body).await
}

/// Sends one request over a connected stream.
pub async fn over<S>(
    stream: S,
    method: Method,
    authority: &str,
    path: &str,
    body: String,
) -> Result<Response, String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    exchange(stream, method, authority, path, &[("accept", "*/*")], body).await
}

async fn exchange<S>(
    stream: S,
    method: Method,
    authority: &str,
    path: &str,
    more_headers: &[(&str, &str)],
    body: String,
) -> Result<Response, String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let exchange = async {
        let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
        let connection = tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(if path.is_empty() { "/" } else { path })
            .header("host", authority)
            .header("content-type", "application/json");
        for (name, value) in more_headers {
            request = request.header(*name, *value);
        }
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| e.to_string())?;
        let (mut head, body) = sender
            .send_request(request)
            .await
            .map_err(|e| e.to_string())?
            .into_parts();
        let body = body.collect().await.map_err(|e| e.to_string())?.to_bytes();
        connection.abort();
        without_time(&mut head.headers);
        let body = String::from_utf8_lossy(&body).into_owned();
        Ok(Response {
            status: head.status.as_u16(),
            headers: head.headers,
            body,
        })
    };
    timeout(TIMEOUT, exchange)
        .await
        .unwrap_or_else(|_| Err(format!("{authority}: no answer")))
}
